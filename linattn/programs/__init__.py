"""The programs behind `python -m linattn`. They use the library; the library does not use them."""
