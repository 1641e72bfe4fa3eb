"""Raw logs to prepared data: split, fit, encode, shuffle, write."""
