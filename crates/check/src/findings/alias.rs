//! `location /i { alias /data/i/; }`: `/i../secret` becomes `/data/i/../secret`.

use gale_config::Contexts;

use super::Check;
use crate::report::Severity;
use crate::tree::Tree;
use crate::variables::Variables;

pub const TRAVERSAL: Check = Check {
    name: "alias_traversal",
    severity: Severity::High,
    advice: "End the location's prefix with a slash, as the alias does. (Gale answers 404 to such requests; nginx does \
             not.)",
    run,
};

fn run(tree: &Tree<'_>, _: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    for (number, node) in tree.named("alias") {
        let Some(location) = node.parent.map(|parent| tree.nodes[parent]) else { continue };
        let prefix = match (location.arg(0), location.arg(1)) {
            (b"^~", prefix) | (prefix, b"") => prefix,
            _ => continue,
        };
        let is_prefix = node.context == Contexts::LOCATION && prefix.starts_with(b"/");
        if is_prefix && !prefix.ends_with(b"/") && node.arg(0).ends_with(b"/") {
            let prefix = bstr::BStr::new(prefix);
            found(number, format!("\"{prefix}../\" leads out of the directory \"{}\"", bstr::BStr::new(node.arg(0))));
        }
    }
}
