"""Quality of a real model in each way to run it, beside the same weights in float32."""
