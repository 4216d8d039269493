//! Host names in a configuration whose addresses are looked up once, when all of the text is known.

use gale_config::{Diagnostic, Word};
use gale_process::Resources;

use crate::server_address::HostAddresses;

/// The names asked for so far.
#[derive(Default)]
pub(super) struct Hosts(Vec<Wanted>);

struct Wanted {
    host: String,
    /// As it stands in the directive.
    word: Word,
    directive: &'static str,
    addresses: HostAddresses,
}

impl Hosts {
    /// The addresses of a name that stands, perhaps with a port, as `word` in `directive`.
    pub fn want(&mut self, host: String, word: &Word, directive: &'static str) -> HostAddresses {
        let addresses = HostAddresses::default();
        self.0.push(Wanted { host, word: word.clone(), directive, addresses: addresses.clone() });
        addresses
    }

    /// Looks all of them up; what is not found is an error each.
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
