#include "abi.h"

// Of the sources this library was compiled from: build.py gives it, library.py compares it.
K3_EXPORT const char* k3_digest() { return K3_DIGEST; }
