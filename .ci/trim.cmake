# llama-cpp-python forces LLAMA_BUILD_COMMON on in the cache; a plain variable shadows the cache entry.
# Without `common` the build is 83 steps instead of 193, and only the image handlers are lost.
set(LLAMA_BUILD_COMMON OFF)
