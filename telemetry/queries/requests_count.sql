-- Number of requests that ended in the range: the size of an export.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param status: only requests with this status, one of done|cancelled|expired|shed|failed (default '')
-- param id: only requests whose id begins with this text (default '')
WITH
    {{range}}
SELECT count() AS requests
FROM requests FINAL
WHERE {{requests_in_range}}
  AND ({status:String} = '' OR status = {status:String})
  AND ({id:String} = '' OR startsWith(request_id, {id:String}))
