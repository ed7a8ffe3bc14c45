import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import com.google.gson.reflect.TypeToken;
import java.util.List;
import java.util.Map;

/** A job as Gson writes it: null for what is not set, and numbers without a type as doubles. */
public class Job {
  String request_id = "from-java";
  String model = "demo";
  String reply = "local";
  Boolean store_result = true;
  Double deadline_ns = 4e18;
  String traceparent;
  List<Map<String, Object>> messages;
  Object tools;
  String tool_choice;
  Double max_tokens = 60.0;
  Double temperature = 1.0;
  List<String> stop;
  Map<String, Object> response_format;

  public static void main(String[] arguments) {
    Gson gson = new GsonBuilder().serializeNulls().create();
    Job job = new Job();
    var of = new TypeToken<List<Map<String, Object>>>() {}.getType();
    // Read without a type and written again: whole numbers have become doubles.
    job.messages = gson.fromJson("[{\"role\":\"user\",\"content\":\"hi\",\"name\":null}]", of);
    job.tools =
        gson.fromJson(
            "[{\"type\":\"function\",\"custom\":null,\"function\":{\"name\":\"f\",\"parameters\":"
                + "{\"type\":\"object\",\"properties\":{},\"maxProperties\":3}}}]",
            of);
    JsonObject written = gson.toJsonTree(job).getAsJsonObject();
    System.out.print(gson.toJson(written));
  }
}
