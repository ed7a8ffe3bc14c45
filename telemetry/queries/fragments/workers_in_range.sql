-- For WHERE: samples of workers in minutes that begin in the range, of the given model.
-- param model: only this model's (default '')
minute >= toDateTime(begin_s, 'UTC')
  AND minute < toDateTime(end_s, 'UTC')
  AND ({model:String} = '' OR model = {model:String})
