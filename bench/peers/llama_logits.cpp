// Writes the logits of llama.cpp, see bench/peers/logits.py: llama_logits MODEL.gguf
//
// Reads one prompt a line, token ids with anything that is no digit between them; writes float32
// (tokens, vocabulary) to standard output. Linked with libllama, compiled by bench/peers/install.py.

#include <cctype>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "llama.h"

namespace {

constexpr int max_tokens = 1024;

std::vector<llama_token> parse_ids(const std::string& line) {
    std::vector<llama_token> ids;
    bool is_in_number = false;
    for (const char character : line) {
        const bool is_digit = std::isdigit(static_cast<unsigned char>(character)) != 0;
        if (is_digit && !is_in_number) ids.push_back(0);
        if (is_digit) ids.back() = ids.back() * 10 + (character - '0');
        is_in_number = is_digit;
    }
    return ids;
}

// Computes a prompt from nothing, all rows with logits; false if libllama refuses it.
bool compute(llama_context* context, const std::vector<llama_token>& ids) {
    llama_memory_clear(llama_get_memory(context), true);
    llama_batch batch = llama_batch_init(static_cast<int>(ids.size()), 0, 1);
    batch.n_tokens = static_cast<int>(ids.size());
    for (int row = 0; row < batch.n_tokens; row++) {
        batch.token[row] = ids[row];
        batch.pos[row] = row;
        batch.n_seq_id[row] = 1;
        batch.seq_id[row][0] = 0;
        batch.logits[row] = 1;
    }
    const bool is_done = llama_decode(context, batch) == 0;
    llama_batch_free(batch);
    return is_done;
}

void log_errors(ggml_log_level level, const char* text, void*) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return 2;
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == nullptr) return 1;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = max_tokens;
    llama_context* context = llama_init_from_model(model, params);
    if (context == nullptr) return 1;
    const auto vocabulary = static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
    std::string line;
    while (std::getline(std::cin, line)) {
        const std::vector<llama_token> ids = parse_ids(line);
        if (ids.empty() || ids.size() > max_tokens || !compute(context, ids)) return 1;
        std::fwrite(llama_get_logits(context), sizeof(float), ids.size() * vocabulary, stdout);
        std::fflush(stdout);
    }
    llama_free(context);
    llama_model_free(model);
    return 0;
}
