/* A library that does nothing: what loading any library costs. */
int ummunotify_trivial(void);

int ummunotify_trivial(void)
{
	return 0;
}
