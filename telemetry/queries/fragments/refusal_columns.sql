-- For SELECT: what a row of refusals AS r is about, to whom it was and why.
tenant,
api_key,
door,
status,
code,
limit_reached,
r.requests AS refused,
gateway
