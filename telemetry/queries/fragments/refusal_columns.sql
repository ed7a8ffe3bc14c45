-- For SELECT: the subject, caller and reason of a row of refusals AS r.
tenant,
api_key,
door,
status,
code,
limit_reached,
r.requests AS refused,
gateway
