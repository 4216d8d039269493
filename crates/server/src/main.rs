//! The command line and the list of modules.

fn main() {}
