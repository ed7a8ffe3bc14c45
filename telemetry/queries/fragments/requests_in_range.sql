-- For WHERE: requests that ended in the range, of the given tenant and model.
-- param tenant: only this tenant's (default '')
-- param model: only this model's (default '')
done_at >= toDateTime64(begin_s, 6, 'UTC')
  AND done_at < toDateTime64(end_s, 6, 'UTC')
  AND ({tenant:String} = '' OR tenant = {tenant:String})
  AND ({model:String} = '' OR if(model_served = '', model_requested, model_served) = {model:String})
