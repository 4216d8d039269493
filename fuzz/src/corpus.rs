//! The committed inputs of a target.

use std::fs;
use std::path::Path;

/// Returns the committed inputs in the order of their names; none for a target without a folder.
pub fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut paths: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort_unstable();
    paths.iter().map(|path| fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))).collect()
}
