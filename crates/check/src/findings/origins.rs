//! `Origin` and `Referer` conditions that requests from other sites can meet.

use super::Check;
use crate::report::Severity;
use crate::tree::Tree;
use crate::variables::{Variables, condition, expression_of};

pub const EXPRESSION: Check = Check {
    name: "origins",
    severity: Severity::Medium,
    advice: "End the expression with $ for an Origin, with (/|$) for a Referer, and write \\. for a dot.",
    run: expressions,
};

pub const NO_REFERER: Check = Check {
    name: "valid_referers",
    severity: Severity::Medium,
    advice: "Remove none: any page can make browsers send requests without a Referer.",
    run: no_referer,
};

fn expressions(tree: &Tree<'_>, _: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    for (number, node) in tree.named("if") {
        let is_about = |name: &str| node.arg(0).strip_prefix(b"(").is_some_and(|arg| arg == name.as_bytes());
        let Some(field) = ["$http_origin", "$http_referer"].into_iter().find(|name| is_about(name)) else { continue };
        let Some(expression) = expression_of(&node) else { continue };
        let text = condition(node.statement).map_or(&b""[..], |(_, text)| text);
        let goes_on = match field {
            "$http_origin" => !expression.is_anchored_at_end(),
            // A slash ends the host name.
            _ => !expression.is_anchored_at_end() && !text.ends_with(b"/") && !text.ends_with(b"|$)"),
        };
        if goes_on {
            found(
                number,
                format!("the expression for {field} has no anchor at its end: example.com.evil.org matches, too"),
            );
        } else if has_plain_dot(text) {
            found(number, format!("an unescaped dot in the expression for {field} matches any character"));
        }
    }
}

/// Returns `true` if the text contains an unescaped dot between letters or digits.
fn has_plain_dot(text: &[u8]) -> bool {
    let is_plain = |window: &[u8]| {
        window[0] != b'\\'
            && window[0].is_ascii_alphanumeric()
            && window[1] == b'.'
            && window[2].is_ascii_alphanumeric()
    };
    text.windows(3).any(is_plain)
}

fn no_referer(tree: &Tree<'_>, _: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    for (number, node) in tree.named("valid_referers") {
        if node.statement.args.iter().any(|word| &word.text[..] == b"none") {
            found(number, "requests without a Referer are accepted as the site's own".to_owned());
        }
    }
}
