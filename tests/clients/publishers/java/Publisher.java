import com.google.gson.Gson;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import io.nats.client.Connection;
import io.nats.client.Message;
import io.nats.client.Nats;
import io.nats.client.Options;
import io.nats.client.Subscription;
import io.nats.client.impl.Headers;
import io.nats.client.impl.NatsMessage;
import java.time.Duration;
import java.util.Map;
import java.util.Set;

/**
 * A service that publishes jobs with jnats: it reads frames and results, and cancels. Prints what
 * happened as one JSON object.
 */
public class Publisher {
  private static final Set<String> ENDS = Set.of("done", "cancelled", "expired", "shed", "failed");

  private final Connection connection;
  private final String tenant;
  private final Subscription frames;

  Publisher(Connection connection, String tenant) {
    this.connection = connection;
    this.tenant = tenant;
    this.frames = connection.subscribe("tok." + tenant + ".>");
  }

  void publish(String id, int maxTokens) throws Exception {
    Map<String, Object> job =
        Map.of(
            "request_id", id,
            "model", "demo",
            "prompt", "What is a lease?",
            "sampling", Map.of("max_tokens", maxTokens, "ignore_eos", true, "seed", 1),
            "reply", tenant,
            "store_result", true);
    Headers headers = new Headers().add("Content-Type", "application/json").add("Nats-Msg-Id", id);
    Message message =
        NatsMessage.builder()
            .subject("jobs.demo.free." + tenant)
            .headers(headers)
            .data(new Gson().toJson(job))
            .build();
    connection.jetStream().publish(message);
  }

  JsonObject frame(String id) throws Exception {
    while (true) {
      Message message = frames.nextMessage(Duration.ofSeconds(30));
      if (message == null) throw new IllegalStateException("no frame of " + id);
      if (message.getSubject().equals("tok." + tenant + "." + id)) return parsed(message);
    }
  }

  String[] end(String id) throws Exception {
    StringBuilder text = new StringBuilder();
    while (true) {
      JsonObject frame = frame(id);
      if (frame.has("text")) text.append(frame.get("text").getAsString());
      String type = frame.get("type").getAsString();
      if (ENDS.contains(type)) return new String[] {type, text.toString()};
    }
  }

  JsonObject ask(String subject) throws Exception {
    Message answer = connection.request(subject, null, Duration.ofSeconds(2));
    return answer == null ? null : parsed(answer);
  }

  JsonObject result(String id) throws Exception {
    while (true) {
      JsonObject answer = ask("ctl.result." + tenant + "." + id);
      if (!answer.has("error")
          || !answer.getAsJsonObject("error").get("retryable").getAsBoolean()) return answer;
      Thread.sleep(50);
    }
  }

  static JsonObject parsed(Message message) {
    return JsonParser.parseString(new String(message.getData())).getAsJsonObject();
  }

  public static void main(String[] arguments) throws Exception {
    Map<String, String> variables = System.getenv();
    String tenant = variables.get("TENANT");
    Options options =
        new Options.Builder()
            .server(variables.get("NATS_URL"))
            .userInfo(variables.get("NATS_USER"), variables.get("NATS_PASSWORD"))
            .inboxPrefix("_INBOX.service." + tenant + ".")
            .build();
    try (Connection connection = Nats.connect(options)) {
      Publisher service = new Publisher(connection, tenant);
      JsonObject told = new JsonObject();
      service.publish("java-1", 20);
      String[] end = service.end("java-1");
      told.addProperty("end", end[0]);
      told.addProperty("text", end[1]);
      told.add("asked", service.result("java-1"));
      told.add("stored", service.ask("$JS.API.DIRECT.GET.RESULTS.results." + tenant + ".java-1"));

      service.publish("java-2", 2000);
      while (!service.frame("java-2").get("type").getAsString().equals("delta")) {}
      connection.publish("ctl.cancel." + tenant + ".java-2", null);
      told.addProperty("cancelled", service.end("java-2")[0]);

      told.add("unknown", service.ask("ctl.result." + tenant + ".never"));
      told.addProperty("foreign", service.ask("ctl.result.shop.java-1") != null);
      System.out.println(told);
    }
  }
}
