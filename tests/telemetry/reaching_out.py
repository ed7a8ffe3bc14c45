"""Ways in which SQL reaches out of a database: for each, what would show that it did.

``{file}`` is a file with ``SECRET`` in it, ``{out}`` a path where nothing is, ``{port}`` a port on
which somebody listens and counts who comes.
"""

from __future__ import annotations

SECRET = "what-no-query-may-see"

_FUNCTIONS = (
    "file('{file}')",
    "file('{file}', 'LineAsString')",
    "file('{file}', 'LineAsString', 'line String')",
    "fileCluster('default', '{file}', 'LineAsString')",
    "filesystem('{file}')",
    "url('http://127.0.0.1:{port}/', 'LineAsString')",
    "url('http://127.0.0.1:{port}/', 'LineAsString', 'line String')",
    "url('file://{file}', 'LineAsString')",
    "url('file://{file}', 'LineAsString', 'line String')",
    "urlCluster('default', 'http://127.0.0.1:{port}/', 'LineAsString', 'line String')",
    "s3('http://127.0.0.1:{port}/bucket/key', 'LineAsString', 'line String')",
    "s3('http://127.0.0.1:{port}/bucket/key', 'a', 'b', 'LineAsString')",
    "s3Cluster('default', 'http://127.0.0.1:{port}/bucket/key', 'LineAsString', 'line String')",
    "gcs('http://127.0.0.1:{port}/bucket/key', 'LineAsString', 'line String')",
    "oss('http://127.0.0.1:{port}/bucket/key', 'LineAsString', 'line String')",
    "cosn('http://127.0.0.1:{port}/bucket/key', 'LineAsString', 'line String')",
    "azureBlobStorage('http://127.0.0.1:{port}/a', 'c', 'b', 'a', 'a2V5', 'CSV')",
    "hdfs('hdfs://127.0.0.1:{port}/x', 'LineAsString', 'line String')",
    "iceberg('http://127.0.0.1:{port}/bucket/key')",
    "icebergLocal('{file}')",
    "deltaLake('http://127.0.0.1:{port}/bucket/key')",
    "deltaLakeLocal('{file}')",
    "hudi('http://127.0.0.1:{port}/bucket/key')",
    "paimonLocal('{file}')",
    "remote('127.0.0.1:{port}', 'system', 'one')",
    "remote('127.0.0.1:{port}', 'system', 'one', 'default', '')",
    "remoteSecure('127.0.0.1:{port}', 'system', 'one')",
    "cluster('default', 'system', 'one')",
    "mysql('127.0.0.1:{port}', 'a', 'b', 'c', 'd')",
    "postgresql('127.0.0.1:{port}', 'a', 'b', 'c', 'd')",
    "mongodb('mongodb://127.0.0.1:{port}/a', 'b', 'line String')",
    "redis('127.0.0.1:{port}', 'k', 'k String, v String')",
    "sqlite('{file}', 't')",
    "odbc('DSN=x', 'a', 'b')",
    "jdbc('jdbc:sqlite:{file}', 't')",
    "ytsaurus('http://127.0.0.1:{port}', '//t', 'x', 'a String')",
    "bigquery('p', 'd', 't')",
    "executable('cat {file}', 'LineAsString', 'line String')",
    "Python(secret)",
    "python(secret)",
    "arrowstream('x')",
    "dictionary('x')",
)
_SQL = (
    # The function of files, in every way in which a function can be named.
    "SELECT file('{file}')",
    "SELECT `file`('{file}')",
    "SELECT \"file\"('{file}')",
    "SELECT `fi\\x6ce`('{file}')",
    "SELECT file /* a */ ('{file}')",
    "SELECT arrayMap(file, ['{file}'])",
    "SELECT arrayMap(`f\\x69le`, ['{file}'])",
    "SELECT arrayMap(x -> file(x), ['{file}'])",
    "SELECT * APPLY(file) FROM (SELECT '{file}' AS x)",
    "SELECT * APPLY file FROM (SELECT '{file}' AS x)",
    "SELECT COLUMNS('x') APPLY(`\\x66ile`) FROM (SELECT '{file}' AS x)",
    "SELECT CAST(file('{file}') AS UInt8)",
    "SELECT throwIf(1, file('{file}'))",
    "EXPLAIN SELECT file('{file}')",
    "EXPLAIN SYNTAX SELECT file('{file}')",
    "EXPLAIN QUERY TREE SELECT arrayMap(file, ['{file}'])",
    "DESCRIBE (SELECT file('{file}') AS x)",
    "WITH file('{file}') AS x SELECT x",
    "SELECT * FROM viewExplain('EXPLAIN', '', (SELECT file('{file}')))",
    "SELECT * FROM view(SELECT file('{file}') AS x)",
    "SELECT * FROM eval('SELECT 1')",
    # The same in texts of which the engine makes expressions.
    *(
        statement.format(file="{file}", structure=structure)
        for structure in (
            "'a Int8, b Int64 DEFAULT file(\\'{file}\\')'",
            "'a Int8, b Int64 MATERIALIZED file(\\'{file}\\')'",
            "concat('a Int8, b Int64 DEF', 'AULT fi', 'le(\\'{file}\\')')",
            "'a Int8, b Int64 DEF' || 'AULT file(\\'{file}\\')'",
            "'a Int8, b Int64 DEF\\x41ULT file(\\'{file}\\')'",
        )
        for statement in (
            "DESCRIBE TABLE null({structure})",
            "SELECT * FROM null({structure})",
            "WITH {structure} AS s SELECT * FROM null(s)",
            "SELECT * FROM `nu\\x6cl`({structure})",
            "SELECT * FROM format(JSONEachRow, {structure}, '[1]')",
            "SELECT * FROM format('CSV', {structure}, '1')",
            "SELECT * FROM values({structure}, (1, 2))",
            "SELECT * FROM generateRandom({structure}) LIMIT 1",
            "SELECT * FROM input({structure})",
            "SELECT structureToCapnProtoSchema({structure})",
            "SELECT structureToProtobufSchema({structure})",
        )
    ),
    "SELECT 1 AS a SETTINGS additional_result_filter = 'toInt64(file(\\'{file}\\'))'",
    (
        "SELECT count() FROM requests SETTINGS parallel_replicas_custom_key = "
        "'toInt64(file(\\'{file}\\'))', max_parallel_replicas = 2, enable_parallel_replicas = 1"
    ),
    (
        "SELECT * FROM format(JSONEachRow, '[1]') SETTINGS schema_inference_hints = "
        "'b Int64 DEFAULT file(\\'{file}\\')'"
    ),
    (
        "SELECT * FROM format(CSV, 'a Int8', 'x') SETTINGS input_format_allow_errors_num = 9, "
        "input_format_record_errors_file_path = '{out}'"
    ),
    # Files as tables.
    "SELECT * FROM `{file}`",
    "SELECT * FROM default.`{file}`",
    "DESCRIBE TABLE default.`{file}`",
    "SHOW CREATE TABLE default.`{file}`",
    "SELECT * FROM merge('default', '.*')",
    # Files that are written.
    "SELECT 1 INTO OUTFILE '{out}'",
    "SELECT 1 INTO /* a */ OUTFILE '{out}' TRUNCATE",
    "SELECT 1 INTO OUTFILE '{out}' AND STDOUT FORMAT TSV",
    "EXPLAIN AST SELECT 1 INTO OUTFILE '{out}'",
    "EXPLAIN SELECT 1 INTO OUTFILE '{out}'",
    "SHOW TABLES INTO OUTFILE '{out}'",
    "DESCRIBE TABLE requests INTO OUTFILE '{out}'",
    "INSERT INTO FUNCTION file('{out}') SELECT 1",
    "INSERT INTO FUNCTION url('http://127.0.0.1:{port}/') SELECT 1",
    "INSERT INTO FUNCTION remote('127.0.0.1:{port}', 'system', 'one') SELECT 1",
    "INSERT INTO prices FROM INFILE '{file}' FORMAT LineAsString",
    "BACKUP TABLE requests TO File('{out}')",
    "BACKUP TABLE requests TO Disk('default', 'x')",
    "BACKUP TABLE requests TO S3('http://127.0.0.1:{port}/bucket/key')",
    "RESTORE TABLE requests FROM File('{out}')",
    # Formats that read files of settings.
    "SELECT 1 FORMAT Template SETTINGS format_template_resultset = '{file}'",
    "SELECT 1 FORMAT Protobuf SETTINGS format_schema = '{file}:X'",
    "SELECT 1 SETTINGS readonly = 0",
    "SELECT 1 SETTINGS max_execution_time = 0",
    "SELECT * FROM format(Template, 'x') SETTINGS format_template_row = '{file}'",
    # Things that would reach out later.
    "CREATE TABLE x (line String) ENGINE = File(LineAsString, '{file}')",
    "CREATE TABLE x (line String) ENGINE = URL('http://127.0.0.1:{port}/', 'LineAsString')",
    "CREATE TABLE x (line String) ENGINE = MySQL('127.0.0.1:{port}', 'a', 'b', 'c', 'd')",
    "CREATE TEMPORARY TABLE x (line String) ENGINE = File(LineAsString, '{file}')",
    "CREATE TEMPORARY TABLE x (a Int8)",
    "CREATE VIEW x AS SELECT file('{file}') AS line",
    "CREATE DATABASE x ENGINE = SQLite('{file}')",
    "CREATE DATABASE x ENGINE = MySQL('127.0.0.1:{port}', 'a', 'b', 'c')",
    "CREATE DATABASE x ENGINE = PostgreSQL('127.0.0.1:{port}', 'a', 'b', 'c')",
    "CREATE DATABASE x ENGINE = Filesystem('/')",
    *(
        f"CREATE DICTIONARY x (a UInt64, b String) PRIMARY KEY a SOURCE({source}) LAYOUT(FLAT()) "
        "LIFETIME(0)"
        for source in ("FILE(PATH '{file}' FORMAT CSV)", "EXECUTABLE(COMMAND 'id' FORMAT TSV)")
    ),
    "CREATE FUNCTION x AS (a) -> file(a)",
    "CREATE NAMED COLLECTION x AS url = 'http://127.0.0.1:{port}/'",
    "CREATE USER x",
    "GRANT ALL ON *.* TO default",
    # What changes the connection, or stops others.
    "SET readonly = 0",
    "EXECUTE AS default SELECT 1",
    "KILL MUTATION WHERE 1",
    "SYSTEM SHUTDOWN",
    "SYSTEM FLUSH LOGS",
    "SYSTEM RELOAD CONFIG",
    "ATTACH TABLE x FROM '{file}' (a Int8) ENGINE = Memory",
    "OPTIMIZE TABLE requests FINAL",
    "CHECK TABLE requests",
    "BEGIN TRANSACTION",
    "SELECT 1; SELECT file('{file}')",
    "SELECT 1 PARALLEL WITH SELECT 2",
    # The users, policies and secrets of the engine itself.
    "SELECT * FROM system.users",
    "SELECT * FROM system.grants",
    "SELECT * FROM system.settings_profiles",
    "SHOW USERS",
    "SHOW ACCESS",
    "SHOW CREATE USER default",
    "SELECT addressToLine(1)",
    "SELECT * FROM system.symbols",
    "SELECT aiGenerate('x', map('credentials', 'x'))",
    (
        "SELECT 1 AS n FORMAT AvroConfluent SETTINGS output_format_avro_confluent_subject = 's', "
        "format_avro_schema_registry_url = 'http://127.0.0.1:{port}/'"
    ),
    "SELECT 1 SETTINGS input_format_record_errors_file_path = '{out}'",
)
REACHING_OUT = (
    *(f"SELECT * FROM {function}" for function in _FUNCTIONS),
    *(f"DESCRIBE TABLE {function}" for function in _FUNCTIONS),
    *(f"SELECT (SELECT count() FROM {function})" for function in _FUNCTIONS),
    *_SQL,
)
