// Command kstatus prints the status that Flux computes for objects. It reads a JSON array of
// objects from standard input and prints a JSON array with a status and a message for each.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

type result struct {
	Status  string `json:"status"`
	Message string `json:"message"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "kstatus:", err)
		os.Exit(1)
	}
}

// run decodes each object by itself: unstructured reads integers as int64, as a client does.
func run() error {
	var objects []json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&objects); err != nil {
		return fmt.Errorf("standard input: %w", err)
	}
	results := []result{}
	for i, text := range objects {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(text); err != nil {
			return fmt.Errorf("object %d: %w", i, err)
		}
		found, err := status.Compute(object)
		if err != nil {
			return fmt.Errorf("object %d: %w", i, err)
		}
		results = append(results, result{found.Status.String(), found.Message})
	}
	return json.NewEncoder(os.Stdout).Encode(results)
}
