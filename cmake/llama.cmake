# Run by CMake in llama.cpp's own project, with CMAKE_ARGS=-DCMAKE_PROJECT_llama.cpp_INCLUDE=.../llama.cmake.
# llama-cpp-python turns on llama.cpp's library for its command-line programs, which nothing here uses: it is
# a third of the compile. Its other third, image models, is off with -DLLAVA_BUILD=OFF.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "llama: build common utils library" FORCE)
