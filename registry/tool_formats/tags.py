"""Tags of the formats in which models write calls."""

OPENING_TAG, CLOSING_TAG = "<tool_call>", "</tool_call>"
FUNCTION_TAG, FUNCTION_END = "<function=", "</function>"
PARAMETER_TAG, PARAMETER_END = "<parameter=", "</parameter>"
KEY_TAG, KEY_END = "<arg_key>", "</arg_key>"
VALUE_TAG, VALUE_END = "<arg_value>", "</arg_value>"

# Mistral's models.
CALLS_TAG = "[TOOL_CALLS]"
ID_TAG = "[CALL_ID]"
ARGUMENTS_TAG = "[ARGS]"

# DeepSeek's models.
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE, JSON_FENCE = "```", "```json"

# Tags that may be single special tokens in a checkpoint.
SPECIAL_TAGS = frozenset(
    {
        *(OPENING_TAG, CLOSING_TAG, KEY_TAG, KEY_END, VALUE_TAG, VALUE_END),
        *(CALLS_TAG, ID_TAG, ARGUMENTS_TAG),
        *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
    }
)
