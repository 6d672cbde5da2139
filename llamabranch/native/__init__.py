"""The only package that calls llama.cpp: handles with lifetimes, NumPy batches, return codes.

No other package imports ``llama_cpp``. Callers check every argument first, with the sizes and ranges
that this package reports, because llama.cpp calls ``abort()`` on most invalid arguments.
"""
