//! Host names in a configuration that are resolved once, after the whole text was read.

use gale_config::server_address::HostAddresses;
use gale_config::{Diagnostic, Word};
use gale_process::Resources;

/// Requested names.
#[derive(Default)]
pub(super) struct Hosts(Vec<Wanted>);

struct Wanted {
    host: String,
    word: Word,
    directive: &'static str,
    addresses: HostAddresses,
}

impl Hosts {
    /// The addresses of a name; `word` contains it in `directive`, possibly with a port.
    pub fn want(&mut self, host: String, word: &Word, directive: &'static str) -> HostAddresses {
        let addresses = HostAddresses::default();
        self.0.push(Wanted { host, word: word.clone(), directive, addresses: addresses.clone() });
        addresses
    }

    /// Resolves all names; each that is not found is an error.
    pub fn resolve(&self, resources: &mut dyn Resources) -> Vec<Diagnostic> {
        let mut missing = Vec::new();
        for Wanted { host, word, directive, addresses } in &self.0 {
            let found = resources.resolve(host).ok();
            match found.filter(|found| !found.is_empty()) {
                Some(found) => addresses.set(found),
                None => {
                    let message = format!("host not found in {directive} \"{}\"", word.text);
                    missing.push(Diagnostic::emerg(message).at(word.span));
                }
            }
        }
        missing
    }
}
