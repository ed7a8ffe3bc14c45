-- The views and their columns, what type each has and what it says, with its unit, NULL rule and values.
-- Of the tables themselves, only the columns that are in no view: the states of t-digests.
-- param table: only this one's (default '')
SELECT
    table,
    name AS column,
    type,
    comment
FROM system.columns
WHERE database = currentDatabase()
  AND ({table:String} = '' OR table = {table:String})
  AND (endsWith(table, '_once') OR table = 'generations' OR startsWith(type, 'AggregateFunction'))
ORDER BY table, position
