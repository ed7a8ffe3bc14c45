-- Refused request by its id, if it was among the first eight of its kind, gateway and second.
-- param id: the id in the refusal's answer
SELECT
    first_at,
    last_at,
    {{refusal_columns}}
FROM refusals AS r FINAL
WHERE has(request_ids, {id:String})
ORDER BY last_at DESC
LIMIT 1
