//! Targets, paths, hosts and escaping: invariants of the normal form, and round trips.

use gale_protocol::host;
use gale_protocol::uri::escape::{Class, Unescape, escape, unescape};
use gale_protocol::uri::{normalize, split};

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    if let Ok(target) = split(data) {
        let raw = target.raw_path(data);
        for merge_slashes in [true, false] {
            let mut scratch = Vec::new();
            let path = target.normalized_path(data, merge_slashes, &mut scratch);
            if target.plain {
                assert_eq!(path, Ok(raw));
            }
        }
    }
    for merge_slashes in [true, false] {
        check_normal_form(data, merge_slashes);
    }
    for class in [Class::Uri, Class::Args, Class::Component, Class::Html, Class::Memcached] {
        let (mut escaped, mut back) = (Vec::new(), Vec::new());
        escape(class, data, &mut escaped);
        unescape(Unescape::All, &escaped, &mut back);
        assert_eq!(back, data);
    }
    for kind in [Unescape::All, Unescape::Uri, Unescape::Redirect] {
        assert!(unescape(kind, data, &mut Vec::new()) <= data.len());
    }
    if let Ok(authority) = host::validate(data) {
        let name = authority.name.of(data);
        let again = host::validate(name).expect("a validated name is a host");
        assert!(again.name == authority.name || name.ends_with(b"."));
    }
}

fn check_normal_form(raw: &[u8], merge_slashes: bool) {
    let mut path = Vec::new();
    if normalize(raw, merge_slashes, &mut path).is_err() {
        return;
    }
    assert!(path.starts_with(b"/") && !path.contains(&0));
    assert!(path.split(|&byte| byte == b'/').all(|segment| segment != b"." && segment != b".."));
    let (mut escaped, mut again) = (Vec::new(), Vec::new());
    escape(Class::Uri, &path, &mut escaped);
    normalize(&escaped, merge_slashes, &mut again).expect("a normal path is right");
    assert_eq!(path, again);
}
