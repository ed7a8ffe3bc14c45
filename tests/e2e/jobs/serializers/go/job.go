// A job as encoding/json writes it: pointers that are nil are null, and so are slices and maps.
package main

import (
	"encoding/json"
	"os"
	"time"
)

type function struct {
	Name        string         `json:"name"`
	Description *string        `json:"description"`
	Parameters  map[string]any `json:"parameters"`
	Strict      *bool          `json:"strict"`
}

type tool struct {
	Type     string   `json:"type"`
	Function function `json:"function"`
}

type message struct {
	Role       string           `json:"role"`
	Content    *string          `json:"content"`
	Name       *string          `json:"name"`
	ToolCalls  []map[string]any `json:"tool_calls"`
	ToolCallID *string          `json:"tool_call_id"`
}

type job struct {
	RequestID   string            `json:"request_id"`
	Model       string            `json:"model"`
	Reply       string            `json:"reply"`
	StoreResult bool              `json:"store_result"`
	Deadline    time.Time         `json:"deadline"`
	Tier        *string           `json:"tier"`
	Messages    []message         `json:"messages"`
	Tools       []tool            `json:"tools"`
	ToolChoice  any               `json:"tool_choice"`
	MaxTokens   *float64          `json:"max_tokens"`
	Stop        []string          `json:"stop"`
	Metadata    map[string]string `json:"metadata"`
	LogitBias   map[int]float64   `json:"logit_bias"`
	Seed        *int64            `json:"seed"`
}

func main() {
	content, most := "hi", 60.0
	parameters := map[string]any{"type": "object", "properties": map[string]any{}}
	err := json.NewEncoder(os.Stdout).Encode(job{
		RequestID:   "from-go",
		Model:       "demo",
		Reply:       "local",
		StoreResult: true,
		Deadline:    time.Date(2096, 11, 28, 12, 0, 0, 123456789, time.UTC),
		Messages:    []message{{Role: "user", Content: &content}},
		Tools:       []tool{{Type: "function", Function: function{Name: "f", Parameters: parameters}}},
		MaxTokens:   &most,
	})
	if err != nil {
		panic(err)
	}
}
