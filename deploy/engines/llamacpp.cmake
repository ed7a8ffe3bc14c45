# Included in llama.cpp's build: halves the compile time without slowing the server.

# Code that computes keeps full optimisation; parsers of requests and templates get -O1.
add_compile_options(
  "$<$<NOT:$<IN_LIST:$<TARGET_PROPERTY:NAME>,ggml\;ggml-base\;ggml-cpu\;llama>>:-O1>")

# These fail to compile in a unity build.
cmake_language(DEFER CALL set_target_properties mtmd PROPERTIES UNITY_BUILD OFF)
cmake_language(DEFER CALL set_source_files_properties "${CMAKE_SOURCE_DIR}/common/json.cpp"
  TARGET_DIRECTORY llama-common PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
