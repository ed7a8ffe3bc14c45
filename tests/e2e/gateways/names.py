"""The names of the two gateways."""

GATEWAYS = ("gateway-1", "gateway-2")
