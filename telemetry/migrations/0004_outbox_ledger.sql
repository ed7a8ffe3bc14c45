-- Which places of the outbox have landed, as ranges: from the first to the last, both included.
-- The range that begins at 1 ends at the low-water mark: everything up to it is in.
CREATE TABLE IF NOT EXISTS outbox_ledger
(
    first_sequence UInt64,
    last_sequence  UInt64
)
ENGINE = ReplacingMergeTree(last_sequence)
ORDER BY first_sequence;
