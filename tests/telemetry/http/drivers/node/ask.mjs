// Asks with ClickHouse's client for Node.js, plain and compressed; prints a line for each answer.
import { createRequire } from 'node:module'

const [packages, url, username, password] = process.argv.slice(2)
const { createClient } = createRequire(`${packages}/`)('@clickhouse/client')
const log = { level: 127 }
const failing = 'SELECT number, throwIf(number = 900000) FROM numbers(2000000)'

for (const response of [false, true]) {
  const compression = { response }
  const client = createClient({ url, username, password, database: 'millrace', compression, log })
  const say = (name, value) => console.log(`${response} ${name}=${value}`)
  say('ping', (await client.ping()).success)
  let answer = await client.query({
    query: `SELECT request_id, cost, lives.worker AS workers FROM requests
      WHERE request_id = {id: String} AND received_at < {until: DateTime64(3)}`,
    query_params: { id: 'req-moved', until: new Date() },
    format: 'JSONEachRow',
    clickhouse_settings: { output_format_json_quote_decimals: 1, wait_end_of_query: 1 },
  })
  say('coding', answer.response_headers['content-encoding'])
  say('row', JSON.stringify(await answer.json()))
  answer = await client.query({ query: 'SELECT number FROM numbers(300000)', format: 'CSV' })
  let count = 0
  for await (const rows of answer.stream()) count += rows.length
  say('count', count)
  for (const query of ['SELECT nothing FROM requests', failing]) {
    try {
      const rows = await client.query({ query, format: 'JSONEachRow' })
      for await (const _ of rows.stream());
      say('failure', 'none')
    } catch (error) {
      say('failure', error.code)
    }
  }
  await client.insert({ table: 'requests', values: [{ request_id: 'x' }] }).catch((error) => {
    say('failure', error.type)
  })
  await client.close()
}
