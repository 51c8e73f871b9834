// Checks notes, inclusion proofs and consistency proofs with Go's own checksum-database packages,
// which nobody of this project wrote. It reads one JSON object a line and answers "ok" or the error.
package main

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

type question struct {
	PublicKey  string   `json:"public_key"`
	Checkpoint string   `json:"checkpoint"`
	Offset     int64    `json:"offset"`
	Leaf       string   `json:"leaf"`
	OldSize    int64    `json:"old_size"`
	OldRoot    string   `json:"old_root"`
	Proof      []string `json:"proof"`
}

func hash(text string) (tlog.Hash, error) {
	var h tlog.Hash
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(data) != tlog.HashSize {
		return h, errors.New("not a hash")
	}
	copy(h[:], data)
	return h, nil
}

func check(q question) error {
	verifier, err := note.NewVerifier(q.PublicKey)
	if err != nil {
		return err
	}
	opened, err := note.Open([]byte(q.Checkpoint), note.VerifierList(verifier))
	if err != nil {
		return err
	}
	lines := strings.Split(opened.Text, "\n")
	if len(lines) < 4 {
		return errors.New("not a checkpoint")
	}
	size, err := strconv.ParseInt(lines[1], 10, 64)
	if err != nil {
		return err
	}
	root, err := hash(lines[2])
	if err != nil {
		return err
	}
	var steps []tlog.Hash
	for _, text := range q.Proof {
		step, err := hash(text)
		if err != nil {
			return err
		}
		steps = append(steps, step)
	}
	if q.OldRoot != "" {
		old, err := hash(q.OldRoot)
		if err != nil {
			return err
		}
		return tlog.CheckTree(steps, size, root, q.OldSize, old)
	}
	if q.Leaf != "" {
		leaf, err := base64.StdEncoding.DecodeString(q.Leaf)
		if err != nil {
			return err
		}
		return tlog.CheckRecord(steps, size, root, q.Offset-1, tlog.RecordHash(leaf))
	}
	return nil
}

func main() {
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<24)
	for in.Scan() {
		var q question
		err := json.Unmarshal(in.Bytes(), &q)
		if err == nil {
			err = check(q)
		}
		if err == nil {
			fmt.Println("ok")
		} else {
			fmt.Println("refused:", err)
		}
	}
}
