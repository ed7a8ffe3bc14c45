import java.math.BigDecimal;
import java.sql.Array;
import java.sql.Connection;
import java.sql.DatabaseMetaData;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;

/** Asks what DBeaver, Metabase and Tableau ask, by JDBC; prints a line for each answer. */
public class Driver {
  public static void main(String[] args) throws SQLException {
    Properties login = new Properties();
    login.setProperty("user", args[1]);
    login.setProperty("password", args[2]);
    try (Connection connection = DriverManager.getConnection(args[0], login)) {
      metadata(connection.getMetaData());
      tables(connection, args[3].split(","));
      row(connection);
      prepared(connection);
      limits(connection);
      failures(connection);
    }
  }

  static void metadata(DatabaseMetaData data) throws SQLException {
    say("product", data.getDatabaseProductName() + " " + data.getDatabaseProductVersion());
    List<String> databases = names(data.getSchemas(), "TABLE_SCHEM");
    databases.addAll(names(data.getCatalogs(), "TABLE_CAT"));
    say("databases", String.valueOf(databases.contains("millrace")));
    List<String> tables = new ArrayList<>();
    try (ResultSet rows = data.getTables(null, "millrace", "req%", new String[] {"TABLE", "VIEW"})) {
      while (rows.next()) {
        tables.add(rows.getString("TABLE_NAME") + ":" + rows.getString("TABLE_TYPE"));
      }
    }
    say("tables", String.join(",", tables));
    List<String> columns = new ArrayList<>();
    try (ResultSet rows = data.getColumns(null, "millrace", "requests", "%")) {
      while (rows.next()) {
        columns.add(rows.getString("COLUMN_NAME") + ":" + rows.getString("TYPE_NAME"));
      }
    }
    say("columns", String.join(";", columns));
    List<String> types = names(data.getTypeInfo(), "TYPE_NAME");
    say("types", String.valueOf(types.contains("Decimal") && types.contains("DateTime64")));
    say("functions", String.valueOf(names(data.getFunctions(null, null, "toDate%"), "FUNCTION_NAME").contains("toDate")));
  }

  static List<String> names(ResultSet rows, String column) throws SQLException {
    List<String> names = new ArrayList<>();
    while (rows.next()) {
      names.add(rows.getString(column));
    }
    rows.close();
    return names;
  }

  static void tables(Connection connection, String[] tables) throws SQLException {
    for (String table : tables) {
      try (Statement statement = connection.createStatement();
          ResultSet rows = statement.executeQuery("SELECT * FROM " + table + " LIMIT 100")) {
        int columns = rows.getMetaData().getColumnCount();
        int count = 0;
        while (rows.next()) {
          for (int number = 1; number <= columns; number++) {
            Object value = rows.getObject(number);
            if (value instanceof Array) {
              ((Array) value).getArray();
            }
          }
          count++;
        }
        say("read " + table, columns + " " + count);
      }
    }
  }

  static void row(Connection connection) throws SQLException {
    try (Statement statement = connection.createStatement();
        ResultSet rows =
            statement.executeQuery(
                "SELECT cost, received_at, energy_j, prompt_tokens, tenant, lives.worker AS workers,"
                    + " map('a', 'b') AS pairs FROM requests WHERE request_id = 'req-moved'")) {
      rows.next();
      say("cost", rows.getBigDecimal("cost").toPlainString());
      say("received", rows.getObject("received_at", OffsetDateTime.class).toInstant().toString());
      say("energy", rows.getObject("energy_j") + " " + rows.wasNull());
      say("tokens", String.valueOf(rows.getLong("prompt_tokens")));
      say("tenant", rows.getString("tenant"));
      say("workers", rows.getArray("workers").getArray() instanceof Object[] ? rows.getString("workers") : "?");
      say("pairs", rows.getObject("pairs").toString());
    }
  }

  static void prepared(Connection connection) throws SQLException {
    try (PreparedStatement statement =
        connection.prepareStatement(
            "SELECT count(), ? FROM requests WHERE tenant = ? AND cost >= ?")) {
      statement.setString(1, "it's \\ a\ttab?");
      statement.setString(2, "acme");
      statement.setBigDecimal(3, new BigDecimal("0.0001"));
      try (ResultSet rows = statement.executeQuery()) {
        rows.next();
        say("prepared", rows.getLong(1) + " " + rows.getString(2));
      }
    }
  }

  static void limits(Connection connection) throws SQLException {
    try (Statement statement = connection.createStatement()) {
      statement.setQueryTimeout(7);
      statement.setMaxRows(5);
      try (ResultSet rows = statement.executeQuery("SELECT number FROM numbers(100)")) {
        int count = 0;
        while (rows.next()) {
          count++;
        }
        say("limited", String.valueOf(count));
      }
    }
    try (Statement statement = connection.createStatement();
        ResultSet rows = statement.executeQuery("SELECT number, toString(number) FROM numbers(300000)")) {
      long sum = 0;
      while (rows.next()) {
        sum += rows.getLong(1) + rows.getString(2).length();
      }
      say("sum", String.valueOf(sum));
    }
  }

  static void failures(Connection connection) throws SQLException {
    for (String sql :
        new String[] {
          "SELECT nothing FROM requests",
          "INSERT INTO requests (request_id) VALUES ('x')",
          "SELECT number, throwIf(number = 900000) FROM numbers(2000000)",
        }) {
      try (Statement statement = connection.createStatement()) {
        if (sql.startsWith("INSERT")) {
          statement.executeUpdate(sql);
        } else {
          ResultSet rows = statement.executeQuery(sql);
          while (rows.next()) {
            rows.getLong(1);
          }
        }
        say("failure", "none");
      } catch (SQLException error) {
        say("failure", String.valueOf(error.getMessage()).split("\n")[0]);
      }
    }
    say("valid", String.valueOf(connection.isValid(3)));
  }

  static void say(String name, String value) {
    System.out.println(name + "=" + value.replace("\n", "\\n"));
  }
}
