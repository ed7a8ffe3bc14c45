-- The views and their columns, what type each has and what it says, with its unit, NULL rule and values.
-- Of the tables themselves, only the columns that are in no view: the states of t-digests.
-- param table: only this one's, with or without _once (default '')
SELECT
    table,
    name AS column,
    type,
    comment
FROM system.columns
WHERE database = currentDatabase()
  AND ({table:String} = '' OR replaceRegexpOne(table, '_once$', '') = replaceRegexpOne({table:String}, '_once$', ''))
  AND (endsWith(table, '_once') OR startsWith(type, 'AggregateFunction'))
ORDER BY table, position
