-- The tables and views, their columns, what type each has and what it says, with its unit.
-- A view ending in _once has each row of its table once: read that.
-- param table: only this one's (default '')
SELECT
    table,
    name AS column,
    type,
    comment
FROM system.columns
WHERE database = currentDatabase()
  AND ({table:String} = '' OR table = {table:String})
  AND table NOT IN ('outbox_ledger', 'schema_migrations')
ORDER BY table, position
