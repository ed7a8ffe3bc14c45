-- For WHERE: refusals in the range, of the tenant that is asked for, and those that somebody looks for.
-- param tenant: only this tenant's (default '')
-- param find: only those of a request whose id begins so, or of this key, limit or code (default '')
recorded_at >= toDateTime64(begin_s, 6, 'UTC')
  AND recorded_at < toDateTime64(end_s, 6, 'UTC')
  AND ({tenant:String} = '' OR tenant = {tenant:String})
  AND ({find:String} = ''
    OR {find:String} IN (api_key, limit_reached, code)
    OR arrayExists(id -> startsWith(id, {find:String}), request_ids))
