use super::*;
use crate::*;
#[test]
fn first() {
    let m = memory::Memory::private();
    let e = m.create();
    e.register(&ME, PageRange::new(0x1000, 0x4000), 5).unwrap();
    assert_eq!(e.record(PageRange::new(0x2000, 0x3000)), Recorded::Hit);
    assert_eq!(e.record(PageRange::new(0x8000, 0x9000)), Recorded::Missed);
    std::println!("{:x?}", read(&e, 128));
    std::println!("{:x?}", read(&e, 128));
    e.unregister(&ME, 5).unwrap();
    std::println!("{:?}", e.statistics());
}
