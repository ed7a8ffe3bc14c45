-- Views and their columns, with type, meaning, unit, NULL rule and values.
-- Tables appear only with the columns that are in no view: the states of t-digests.
-- param table: only this table's, with or without _once (default '')
SELECT
    table,
    columns.name AS column,
    type,
    columns.comment AS comment
FROM system.columns AS columns
INNER JOIN system.tables AS tables
    ON tables.database = columns.database AND tables.name = columns.table
WHERE columns.database = currentDatabase()
  AND ({table:String} = '' OR replaceRegexpOne(table, '_once$', '') = replaceRegexpOne({table:String}, '_once$', ''))
  AND (tables.engine = 'View' OR startsWith(type, 'AggregateFunction'))
ORDER BY table, position
