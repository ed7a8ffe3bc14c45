-- For WHERE: usage in minutes that begin in the range, of the given tenant and model.
-- param tenant: only this tenant's (default '')
-- param model: only this model's (default '')
minute >= toDateTime(begin_s, 'UTC')
  AND minute < toDateTime(end_s, 'UTC')
  AND ({tenant:String} = '' OR tenant = {tenant:String})
  AND ({model:String} = '' OR model = {model:String})
