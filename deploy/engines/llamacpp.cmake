# Included into llama.cpp's build: halves the time that the compiler takes, at no cost in speed.

# What computes is optimised as usual, what reads requests and templates less.
add_compile_options(
  "$<$<NOT:$<IN_LIST:$<TARGET_PROPERTY:NAME>,ggml\;ggml-base\;ggml-cpu\;llama>>:-O1>")

# These do not compile in one piece with others.
cmake_language(DEFER CALL set_target_properties mtmd PROPERTIES UNITY_BUILD OFF)
cmake_language(DEFER CALL set_source_files_properties "${CMAKE_SOURCE_DIR}/common/json.cpp"
  TARGET_DIRECTORY llama-common PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
