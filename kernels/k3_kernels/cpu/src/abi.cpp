#include "abi.h"

K3_EXPORT int k3_abi() { return K3_ABI; }
