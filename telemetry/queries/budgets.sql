-- Monthly budget of each tenant and API key, and its spending in this UTC month.
-- key_id is empty for a tenant's own budget, which all of its keys share; a key's budget counts that
-- key alone. spent_share is NULL for a budget of 0. Removed budgets are left out. A request counts in
-- the month in which it ended; the limiter counts it in the month in which it began, and running ones
-- too. Money is exact, as text; a row for each currency.
-- param tenant: only this tenant's; empty: all (default '')
SELECT
    b.tenant AS tenant,
    b.key_id AS key_id,
    b.currency AS currency,
    toString(b.budget) AS budget_amount,
    toString(toDecimal256(ifNull(s.spent, 0), 12)) AS spent_amount,
    toFloat64(ifNull(s.spent, 0)) / nullIf(toFloat64(b.budget), 0) AS spent_share
FROM
(
    -- A tuple, as argMax passes over rows whose amount is NULL.
    SELECT tenant, key_id, currency,
        tupleElement(argMax(tuple(monthly_budget), valid_from), 1) AS budget
    FROM budgets
    WHERE {tenant:String} = '' OR tenant = {tenant:String}
    GROUP BY tenant, key_id, currency
    HAVING isNotNull(budget)
) AS b
LEFT JOIN
(
    SELECT u.tenant AS tenant, owner AS key_id, u.currency AS currency, sum(u.cost) AS spent
    FROM usage_by_minute AS u FINAL
    ARRAY JOIN if(u.key_id = '', [''], ['', u.key_id]) AS owner
    WHERE u.minute >= toStartOfMonth(now('UTC'), 'UTC')
      AND ({tenant:String} = '' OR u.tenant = {tenant:String})
    GROUP BY tenant, key_id, currency
) AS s ON s.tenant = b.tenant AND s.key_id = b.key_id AND s.currency = b.currency
ORDER BY currency, tenant, key_id
