//! What all modules share: processes, HTTP, logs.
