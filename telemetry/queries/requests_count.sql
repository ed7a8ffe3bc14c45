-- How many requests ended in the range: what an export of them would hold.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param status: only those that ended so, one of done|cancelled|expired|shed|failed (default '')
-- param id: only those whose id begins so (default '')
WITH
    {{range}}
SELECT count() AS requests
FROM requests FINAL
WHERE {{requests_in_range}}
  AND ({status:String} = '' OR status = {status:String})
  AND ({id:String} = '' OR startsWith(request_id, {id:String}))
