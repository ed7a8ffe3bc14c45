// Calls the API with the Java client of openapi-generator.

import com.google.gson.Gson;
import java.io.BufferedReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.LinkedHashMap;
import java.util.Map;
import okhttp3.Response;
import org.openapitools.client.ApiClient;
import org.openapitools.client.ApiException;
import org.openapitools.client.api.BatchesApi;
import org.openapitools.client.api.EmbeddingsApi;
import org.openapitools.client.api.FilesApi;
import org.openapitools.client.api.GenerationApi;
import org.openapitools.client.api.ModelsApi;
import org.openapitools.client.model.*;

class Main {
  public static void main(String[] arguments) throws Exception {
    ApiClient client = new ApiClient();
    client.setBasePath(arguments[0]);
    client.setBearerToken("none");
    GenerationApi generation = new GenerationApi(client);
    UserMessage user =
        new UserMessage()
            .role(UserMessage.RoleEnum.USER)
            .content(new UserMessageContent("Hello there"));
    ChatCompletionRequest chat =
        new ChatCompletionRequest()
            .model("echo")
            .messages(List.of(new ChatCompletionRequestMessagesItem(user)));
    Map<String, Object> told = new LinkedHashMap<>();

    ChatCompletion whole = generation.createChatCompletion(chat, null, null);
    told.put("whole", whole.getChoices().get(0).getMessage().getContent());

    StringBuilder streamed = new StringBuilder();
    chat.setStream(true);
    try (Response answer = generation.createChatCompletionCall(chat, null, null, null).execute();
        BufferedReader lines = new BufferedReader(answer.body().charStream())) {
      for (String line = lines.readLine(); line != null; line = lines.readLine()) {
        if (!line.startsWith("data: {")) {
          continue;
        }
        for (ChatChunkChoice choice :
            ChatCompletionChunk.fromJson(line.substring(6)).getChoices()) {
          String content = choice.getDelta().getContent();
          streamed.append(content == null ? "" : content);
        }
      }
    }
    told.put("streamed", streamed.toString());
    chat.setStream(null);

    told.put(
        "models", new ModelsApi(client).listModels().getData().stream().map(ModelCard::getId).toList());
    EmbeddingRequestInput texts =
        new EmbeddingRequestInput(
            List.of(
                new EmbeddingRequestInputListItem("a"), new EmbeddingRequestInputListItem("b")));
    EmbeddingRequest embedding = new EmbeddingRequest().model("echo").input(texts);
    told.put(
        "embeddings", new EmbeddingsApi(client).createEmbeddings(embedding).getData().size());
    TokenizeRequest tokenize = new TokenizeRequest().model("echo").prompt("abc");
    told.put("tokens", new ModelsApi(client).tokenizeAtRoot(tokenize).getCount());
    Path requests = Files.writeString(Path.of("requests.jsonl"), "{}");
    told.put("file", new FilesApi(client).uploadFile(requests.toFile(), "batch").getBytes());
    ResponsesRequest asked =
        new ResponsesRequest().model("echo").input(new ResponsesRequestInput("Hello there"));
    ResponseAnswer response = generation.createResponse(asked, null, null);
    told.put(
        "response",
        response.getOutput().get(0).getMessageItem().getContent().get(0).getOutputText().getText());
    GivenMessage turn =
        new GivenMessage()
            .role(GivenMessage.RoleEnum.USER)
            .content(new GivenMessageContent("Hello there"));
    MessagesRequest anthropic =
        new MessagesRequest().model("echo").maxTokens(20).messages(List.of(turn));
    MessageAnswer message = generation.createMessage(anthropic, null, null);
    told.put("message", message.getContent().get(0).getText().getText());
    told.put("batches", new BatchesApi(client).listBatches(5, null).getData().size());
    try {
      generation.createChatCompletion(chat.model("absent"), null, null);
    } catch (ApiException refused) {
      told.put("refused", ErrorBody.fromJson(refused.getResponseBody()).getError().getCode());
    }
    System.out.println(new Gson().toJson(told));
    client.getHttpClient().dispatcher().executorService().shutdown();
    client.getHttpClient().connectionPool().evictAll();
  }
}
