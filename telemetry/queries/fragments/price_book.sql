-- For FROM: prices p of each row of l; NULL if the store does not know that version.
LEFT JOIN
(
    SELECT
        model,
        version,
        toNullable(input_per_million) AS input_per_million,
        toNullable(cached_input_per_million) AS cached_input_per_million,
        toNullable(output_per_million) AS output_per_million
    FROM prices FINAL
) AS p ON p.model = l.model AND p.version = l.price_version
