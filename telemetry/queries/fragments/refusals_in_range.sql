-- For WHERE: refusals in the range, of the given tenant, that match the searched text.
-- param tenant: only this tenant's (default '')
-- param find: only refusals with this key, limit or code, or of a request whose id begins with this text (default '')
recorded_at >= toDateTime64(begin_s, 6, 'UTC')
  AND recorded_at < toDateTime64(end_s, 6, 'UTC')
  AND ({tenant:String} = '' OR tenant = {tenant:String})
  AND ({find:String} = ''
    OR {find:String} IN (api_key, limit_reached, code)
    OR arrayExists(id -> startsWith(id, {find:String}), request_ids))
