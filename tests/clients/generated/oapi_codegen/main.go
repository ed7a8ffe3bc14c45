// Calls the API with the client that oapi-codegen generates.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"mime/multipart"
	"net/http"
	"os"
	"strings"

	"generated/api"
)

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	ctx := context.Background()
	key := api.WithRequestEditorFn(func(_ context.Context, request *http.Request) error {
		request.Header.Set("Authorization", "Bearer none")
		return nil
	})
	client := must(api.NewClientWithResponses(os.Args[1], key))
	yes, tokens, limit := true, 20, 5
	model := "echo"

	var content api.UserMessageContent
	check(content.FromUserMessageContent0("Hello there"))
	var message api.ChatCompletionRequestMessagesItem
	check(message.FromUserMessage(api.UserMessage{Content: &content}))
	chat := api.ChatCompletionRequest{
		Model: model, Messages: []api.ChatCompletionRequestMessagesItem{message},
	}
	whole := must(client.CreateChatCompletionWithResponse(ctx, nil, chat)).JSON200

	chat.Stream = &yes
	stream := must(client.CreateChatCompletion(ctx, nil, chat))
	defer stream.Body.Close()
	streamed := ""
	for lines := bufio.NewScanner(stream.Body); lines.Scan(); {
		data, isData := strings.CutPrefix(lines.Text(), "data: {")
		if !isData {
			continue
		}
		var chunk api.ChatCompletionChunk
		check(json.Unmarshal([]byte("{"+data), &chunk))
		for _, choice := range chunk.Choices {
			if choice.Delta.Content != nil {
				streamed += *choice.Delta.Content
			}
		}
	}
	chat.Stream = nil

	models := must(client.ListModelsWithResponse(ctx)).JSON200
	var text api.EmbeddingRequestInputListItem
	check(text.FromEmbeddingRequestInputListItem0("a"))
	var texts api.EmbeddingRequestInput
	check(texts.FromEmbeddingRequestInput1([]api.EmbeddingRequestInputListItem{text, text}))
	embedding := api.EmbeddingRequest{Model: model, Input: texts}
	vectors := must(client.CreateEmbeddingsWithResponse(ctx, embedding)).JSON200
	prompt := "abc"
	tokenize := api.TokenizeRequest{Model: model, Prompt: &prompt}
	counted := must(client.TokenizeAtRootWithResponse(ctx, tokenize)).JSON200

	var form bytes.Buffer
	parts := multipart.NewWriter(&form)
	check(parts.WriteField("purpose", "batch"))
	_ = must(must(parts.CreateFormFile("file", "requests.jsonl")).Write([]byte("{}")))
	check(parts.Close())
	file := must(client.UploadFileWithBodyWithResponse(ctx, parts.FormDataContentType(), &form))

	var input api.ResponsesRequestInput
	check(input.FromResponsesRequestInput0("Hello there"))
	asked := api.ResponsesRequest{Model: model, Input: input}
	answer := must(client.CreateResponseWithResponse(ctx, nil, asked)).JSON200
	item := must(answer.Output[0].AsMessageItem())
	part := must(item.Content[0].AsOutputText())

	var turn api.GivenMessageContent
	check(turn.FromGivenMessageContent0("Hello there"))
	anthropic := api.MessagesRequest{
		Model:     model,
		MaxTokens: &tokens,
		Messages:  []api.GivenMessage{{Role: "user", Content: &turn}},
	}
	said := must(client.CreateMessageWithResponse(ctx, nil, anthropic)).JSON200
	block := must(said.Content[0].AsText())

	batches := must(client.ListBatchesWithResponse(ctx, &api.ListBatchesParams{Limit: &limit})).JSON200
	chat.Model = "absent"
	refused := must(client.CreateChatCompletionWithResponse(ctx, nil, chat)).JSON404

	var names []string
	for _, card := range models.Data {
		names = append(names, card.Id)
	}
	check(json.NewEncoder(os.Stdout).Encode(map[string]any{
		"whole":      whole.Choices[0].Message.Content,
		"streamed":   streamed,
		"models":     names,
		"embeddings": len(vectors.Data),
		"tokens":     counted.Count,
		"file":       file.JSON200.Bytes,
		"response":   part.Text,
		"message":    block.Text,
		"batches":    len(batches.Data),
		"refused":    refused.Error.Code,
	}))
}
