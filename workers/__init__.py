"""Model workers over llama-cpp-python."""
