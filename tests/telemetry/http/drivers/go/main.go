// Asks what Grafana's data source asks, by clickhouse-go over HTTP; prints a line for each answer.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
)

var methods = map[string]clickhouse.CompressionMethod{
	"none": clickhouse.CompressionNone,
	"lz4":  clickhouse.CompressionLZ4,
	"zstd": clickhouse.CompressionZSTD,
	"gzip": clickhouse.CompressionGZIP,
}

func main() {
	address, user, password, tables := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	for _, name := range os.Args[5:] {
		options := &clickhouse.Options{
			Protocol:    clickhouse.HTTP,
			Addr:        []string{address},
			Auth:        clickhouse.Auth{Database: "millrace", Username: user, Password: password},
			Compression: &clickhouse.Compression{Method: methods[name]},
			Settings:    clickhouse.Settings{"max_execution_time": 30},
			DialTimeout: 5 * time.Second,
		}
		ask(name, options, strings.Split(tables, ","))
	}
}

func ask(name string, options *clickhouse.Options, tables []string) {
	ctx := context.Background()
	conn, err := clickhouse.Open(options)
	must(err)
	defer conn.Close()
	must(conn.Ping(ctx))
	version, err := conn.ServerVersion()
	must(err)
	fmt.Printf("%s version=%d.%d %s\n", name, version.Version.Major, version.Version.Minor, version.Timezone)
	for _, table := range tables {
		rows, err := conn.Query(ctx, "SELECT * FROM "+table+" LIMIT 100")
		must(err)
		values := make([]any, len(rows.ColumnTypes()))
		for i, column := range rows.ColumnTypes() {
			values[i] = reflect.New(column.ScanType()).Interface()
		}
		count := 0
		for rows.Next() {
			must(rows.Scan(values...))
			count++
		}
		must(rows.Err())
		fmt.Printf("%s read %s=%d %d\n", name, table, len(values), count)
	}
	var cost, received, workers string
	must(conn.QueryRow(ctx, `SELECT toString(cost), toString(received_at), arrayStringConcat(lives.worker, ',')
		FROM requests WHERE request_id = {id:String} AND tenant != {other:String}`,
		clickhouse.Named("id", "req-moved"), clickhouse.Named("other", "it's")).Scan(&cost, &received, &workers))
	fmt.Printf("%s row=%s %s %s\n", name, cost, received, workers)
	var at time.Time
	var metadata map[string]string
	var energy *float64
	var lives []string
	must(conn.QueryRow(ctx, `SELECT received_at, map('k', 'v'), energy_j, lives.worker FROM requests
		WHERE request_id = 'req-moved'`).Scan(&at, &metadata, &energy, &lives))
	fmt.Printf("%s typed=%d %v %v %v\n", name, at.UnixMicro(), metadata, energy == nil, lives)
	rows, err := conn.Query(ctx, "SELECT number, toString(number), if(number % 2 = 0, NULL, toLowCardinality('odd')) FROM numbers(300000)")
	must(err)
	var sum, odd uint64
	for rows.Next() {
		var number uint64
		var text string
		var kind *string
		must(rows.Scan(&number, &text, &kind))
		sum += number + uint64(len(text))
		if kind != nil {
			odd++
		}
	}
	must(rows.Err())
	fmt.Printf("%s sum=%d %d\n", name, sum, odd)
	for _, sql := range []string{
		"SELECT nothing FROM requests",
		"INSERT INTO requests (request_id) VALUES ('x')",
		"SELECT number, throwIf(number = 900000) FROM numbers(2000000)",
	} {
		fmt.Printf("%s failure=%d\n", name, failure(conn.Query(ctx, sql)))
	}
}

type rows interface {
	Next() bool
	Err() error
}

func failure(answer rows, err error) int {
	if err == nil {
		for answer.Next() {
		}
		err = answer.Err()
	}
	var exception *clickhouse.Exception
	if errors.As(err, &exception) {
		return int(exception.Code)
	}
	if err != nil {
		fmt.Println(err)
		return -1
	}
	return 0
}

func must(err error) {
	if err != nil {
		panic(fmt.Sprintf("%T %v", err, err))
	}
}
