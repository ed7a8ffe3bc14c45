-- For SELECT: the rows of usage_by_minute AS u added up.
sum(u.requests) AS requests,
sum(u.done) AS done,
sum(u.cancelled) AS cancelled,
sum(u.expired) AS expired,
sum(u.shed) AS shed,
sum(u.failed) AS failed,
sum(u.prompt_tokens) AS prompt_tokens,
sum(u.cached_tokens) AS cached_tokens,
sum(u.completion_tokens) AS completion_tokens,
toString(sum(u.cost)) AS cost,
currency,
sum(u.device_us) AS device_us,
toString(sum(u.device_cost)) AS device_cost
