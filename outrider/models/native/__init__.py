"""Models that run as a program of native code, one call per forward."""
