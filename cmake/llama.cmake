# CMake runs this file in llama.cpp's own project, with CMAKE_ARGS=-DCMAKE_PROJECT_llama.cpp_INCLUDE=.../llama.cmake.
# llama-cpp-python turns on llama.cpp's library for its command-line programs. Nothing here uses it, and it takes
# a third of the compile time. Image models take another third; -DLLAVA_BUILD=OFF leaves them out.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "llama: build common utils library" FORCE)
