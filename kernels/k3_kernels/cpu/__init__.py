"""The native CPU backend: a small C++ library built at install, and the operations over it."""
