// Calls the API with the Go client of openapi-generator.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strings"

	api "generated/api"
)

func must[T any](value T, _ *http.Response, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	ctx := context.WithValue(context.Background(), api.ContextAccessToken, "none")
	configuration := api.NewConfiguration()
	configuration.Servers = api.ServerConfigurations{{URL: os.Args[1]}}
	client := api.NewAPIClient(configuration)
	model, hello, abc := "echo", "Hello there", "abc"

	content := api.StringAsUserMessageContent(&hello)
	user := api.NewUserMessage("user")
	user.SetContent(content)
	messages := []api.ChatCompletionRequestMessagesItem{
		api.UserMessageAsChatCompletionRequestMessagesItem(user),
	}
	chat := api.NewChatCompletionRequest(messages, model)
	generation := client.GenerationAPI
	whole := must(generation.CreateChatCompletion(ctx).ChatCompletionRequest(*chat).Execute())

	// The client reads a stream as one answer, fails, and keeps the bytes for its caller.
	chat.SetStream(true)
	_, answer, _ := generation.CreateChatCompletion(ctx).ChatCompletionRequest(*chat).Execute()
	streamed := ""
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		data, isData := strings.CutPrefix(lines.Text(), "data: {")
		if !isData {
			continue
		}
		var chunk api.ChatCompletionChunk
		check(json.Unmarshal([]byte("{"+data), &chunk))
		for _, choice := range chunk.Choices {
			streamed += choice.Delta.GetContent()
		}
	}
	chat.SetStream(false)

	models := must(client.ModelsAPI.ListModels(ctx).Execute())
	texts := []api.EmbeddingRequestInputListItem{
		api.StringAsEmbeddingRequestInputListItem(&hello),
		api.StringAsEmbeddingRequestInputListItem(&abc),
	}
	embedding := api.NewEmbeddingRequest(
		api.ArrayOfEmbeddingRequestInputListItemAsEmbeddingRequestInput(&texts), model,
	)
	vectors := must(client.EmbeddingsAPI.CreateEmbeddings(ctx).EmbeddingRequest(*embedding).Execute())
	tokenize := api.NewTokenizeRequest(model)
	tokenize.SetPrompt(abc)
	counted := must(client.ModelsAPI.TokenizeAtRoot(ctx).TokenizeRequest(*tokenize).Execute())

	check(os.WriteFile("requests.jsonl", []byte("{}"), 0o600))
	upload, err := os.Open("requests.jsonl")
	check(err)
	file := must(client.FilesAPI.UploadFile(ctx).File(upload).Purpose("batch").Execute())

	asked := api.NewResponsesRequest(api.StringAsResponsesRequestInput(&hello), model)
	response := must(generation.CreateResponse(ctx).ResponsesRequest(*asked).Execute())
	turn := api.NewGivenMessage("user")
	turn.SetContent(api.StringAsGivenMessageContent(&hello))
	anthropic := api.NewMessagesRequest([]api.GivenMessage{*turn}, model)
	anthropic.SetMaxTokens(20)
	message := must(generation.CreateMessage(ctx).MessagesRequest(*anthropic).Execute())
	batches := must(client.BatchesAPI.ListBatches(ctx).Limit(5).Execute())

	chat.SetModel("absent")
	_, _, err = generation.CreateChatCompletion(ctx).ChatCompletionRequest(*chat).Execute()
	var refused *api.GenericOpenAPIError
	if !errors.As(err, &refused) {
		panic(err)
	}
	var names []string
	for _, card := range models.Data {
		names = append(names, card.Id)
	}
	check(json.NewEncoder(os.Stdout).Encode(map[string]any{
		"whole":      whole.Choices[0].Message.GetContent(),
		"streamed":   streamed,
		"models":     names,
		"embeddings": len(vectors.Data),
		"tokens":     counted.Count,
		"file":       file.Bytes,
		"response":   response.Output[0].MessageItem.Content[0].OutputText.Text,
		"message":    message.Content[0].Text.Text,
		"batches":    len(batches.Data),
		"refused":    refused.Model().(api.ErrorBody).Error.Code,
	}))
}
